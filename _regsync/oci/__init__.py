"""The vocabulary of the OCI specifications: names, digests, manifests."""
