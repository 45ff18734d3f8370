"""Building blocks of the decoders that hold weights."""
