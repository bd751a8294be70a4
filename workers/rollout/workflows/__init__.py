"""How one group comes about: from a lease to samples with rewards."""
