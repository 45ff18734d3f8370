"""KV memory as integers: which request holds which slots. No tensors here."""
