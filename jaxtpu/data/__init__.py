"""Data: from a source of documents to sharded batches of tokens on the devices."""
