"""The admin pages: each screen gathers facts from the services and hands them to `loraplex.web`."""
