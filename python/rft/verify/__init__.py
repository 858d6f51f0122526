"""`rft verify`: parity on a config's own architecture at small size, checked by the code that trains."""
