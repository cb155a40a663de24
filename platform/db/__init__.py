"""The database: tables and sessions; knows no HTTP and no engine."""
