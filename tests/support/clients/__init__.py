"""Client libraries in environments of their own, and how tests drive them."""
