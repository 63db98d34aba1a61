"""The command line. The only part of Souffle that prints."""
