"""Pages: typed contexts, templates and static files; knows neither the database nor the engine."""
