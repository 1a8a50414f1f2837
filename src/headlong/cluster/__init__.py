"""Replicas of one model on Ray Serve behind one server: the only package that knows Ray."""
