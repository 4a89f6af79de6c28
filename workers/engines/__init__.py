"""The engines: each turns a batch into rows in its own way, behind `vecd.workers.engine.Engine`."""
