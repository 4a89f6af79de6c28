"""What HTTP requests mean: routes, fields, operations, dialects, the routes of the system itself."""
