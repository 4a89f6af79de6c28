"""What systemd asks of a service: notifications, the watchdog, `vecd reload`, `vecd install-service`."""
