"""Types and seams shared by every layer. Standard library only, no side effects."""
