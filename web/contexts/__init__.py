"""What each page needs to be drawn: frozen, typed, and free of where the facts came from."""
