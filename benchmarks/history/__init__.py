"""ASV's folder: it imports all that is here at every commit it visits, so nothing else is."""
