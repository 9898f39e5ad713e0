"""What lives between the HTTP routes and the compute thread; everything here runs on the event loop."""
