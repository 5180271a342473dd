"""What notebooks show and what they save for their reader: tables and plots, guesses, progress."""
