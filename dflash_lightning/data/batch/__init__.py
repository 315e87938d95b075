"""From documents to micro-batches: packing, collating, loading, exact resume."""
