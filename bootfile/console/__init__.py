"""What a command reads and writes: its words, its options, its files and its page."""
