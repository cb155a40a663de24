"""The native CPU step: a whole step of a decoder in one call of C++, built on this machine."""
