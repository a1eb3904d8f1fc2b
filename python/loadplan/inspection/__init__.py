"""What a load will do, told from the headers alone."""
