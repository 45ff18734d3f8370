"""Types and interfaces shared by every layer. Standard library only, no side effects."""
