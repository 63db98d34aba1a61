"""What is measured and checked outside of the tests."""
