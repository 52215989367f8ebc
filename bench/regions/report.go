package main

import (
	"fmt"
	"io"
)

// report is what the run showed.
type report struct {
	ground, folder string
	rows           []row
	breaches       []string
}

type row struct{ scene, measured, verdict string }

func (r *report) add(scene, format string, args ...any) {
	r.rows = append(r.rows, row{scene, fmt.Sprintf(format, args...), "held"})
}

// print adds what is measured and not judged.
func (r *report) print(scene, format string, args ...any) {
	r.rows = append(r.rows, row{scene, fmt.Sprintf(format, args...), "printed"})
}

func (r *report) skip(scene, why string) { r.rows = append(r.rows, row{scene, why, "skipped"}) }

// hold breaks the scene's row unless ok.
func (r *report) hold(ok bool, scene, format string, args ...any) {
	if !ok {
		r.breaches = append(r.breaches, scene+": "+fmt.Sprintf(format, args...))
		for i := range r.rows {
			if r.rows[i].scene == scene && r.rows[i].verdict != "skipped" {
				r.rows[i].verdict = "**not held**"
			}
		}
	}
}

// write prints the table of docs/geo.md.
func (r *report) write(out io.Writer) {
	fmt.Fprintf(out, "three regions on %s\n\n| what | measured | |\n|---|---|---|\n", r.ground)
	for _, x := range r.rows {
		fmt.Fprintf(out, "| %s | %s | %s |\n", x.scene, x.measured, x.verdict)
	}
	for _, b := range r.breaches {
		fmt.Fprintf(out, "\nBREACH %s\n", b)
	}
	if len(r.breaches) > 0 {
		fmt.Fprintf(out, "\n%s has the configs and logs\n", r.folder)
	}
}
