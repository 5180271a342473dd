"""What single notebooks show and `course` may not make: drawings and tables that measure or read an op."""
