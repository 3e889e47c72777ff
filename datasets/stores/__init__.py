"""The bytes or pixels of a sample, by id: from files, packs, an object store or a shared cache."""
