"""Where federations come from: one file a format. Optional libraries are imported where they are needed."""
