"""The pure session logic: no I/O, no clock. Imports neither `service` nor `client`."""
