"""Target features, kept in memory or on disk."""
