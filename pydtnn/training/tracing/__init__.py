"""Records of what each rank does, and their files."""
