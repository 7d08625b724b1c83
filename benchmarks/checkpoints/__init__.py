"""What checkpoints cost: a study of formats, and training beside checkpoints."""
