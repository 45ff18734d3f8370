"""The pure part of sessions: no input, no output, no clock. Imports neither service nor client."""
