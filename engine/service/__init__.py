"""Engine state between the HTTP routes and the compute thread. Everything here runs on the event loop."""
