"""Where rows come from: files, folders, the Hub, and the columns of each format."""
