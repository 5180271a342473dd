"""What notebooks show, and what they remember of their reader: tables and plots, guesses, progress."""
