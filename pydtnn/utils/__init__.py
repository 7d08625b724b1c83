"""What every part of the library may use: errors, files, names, limits, facts of this machine."""
