"""The REST routes, one file a resource; they know HTTP and refuse to know torch."""
