package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"evenkeel/bench/lab/vectors"
)

type decideCmd struct {
	Snapshot string `required:"" placeholder:"FILE" help:"Read the round from FILE: the in object of a br0 vector, a whole vector, or a line of the decision log; - is stdin."`
	Policy   string `required:"" placeholder:"NAME" help:"Run this policy. There are: ${policies}."`
	JSON     bool   `name:"json" help:"Print one JSON document."`
}

// Run makes the decisions of the one round in --snapshot. It prints which request goes to which
// rank, and why the other requests wait.
func (c *decideCmd) Run(std streams) error {
	var data []byte
	var err error
	if c.Snapshot == "-" {
		data, err = io.ReadAll(os.Stdin)
	} else {
		data, err = os.ReadFile(c.Snapshot)
	}
	if err != nil {
		return err
	}
	report, err := vectors.Decide(data, c.Policy)
	switch {
	case errors.Is(err, vectors.ErrSeveral):
		return fmt.Errorf("%s holds more than one round, as a decision log does; give one of its lines, such as `tail -n 1 FILE | evenkeel "+
			"decide --snapshot -`, or replay all of it with `evenkeel simulate --log`", c.Snapshot)
	case errors.As(err, new(*json.SyntaxError)): // the file is not JSON
		return fmt.Errorf("%s: %w; it must hold JSON: the in object of a br0 vector, a whole vector, or a line of the decision log", c.Snapshot,
			err)
	case err != nil:
		return err
	}
	if c.JSON {
		return writeJSON(std.out, report)
	}
	w := tabwriter.NewWriter(std.out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "policy\t%s\n", report.Policy)
	fmt.Fprintln(w, "entry\tworker\tscore\tstage")
	for _, a := range report.Assignments {
		fmt.Fprintf(w, "%d\t%d\t%g\t%d\n", a.Entry, a.Worker, a.Score, a.Stage)
	}
	for _, l := range report.Left {
		fmt.Fprintf(w, "%d\tleft\t%s\n", l.Entry, l.Why)
	}
	return w.Flush()
}
