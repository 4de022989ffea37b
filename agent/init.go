package agent

func runInit() {}
