"""Model folders: what architecture they hold, how versions of them are published and fetched."""
