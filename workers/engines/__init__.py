"""The engines: each turns a batch into rows in its own way, behind `workers.engine.Engine`."""
