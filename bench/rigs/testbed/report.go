package testbed

import (
	"context"
	"fmt"
	"io"
)

// Report is the table of a run: what each scene measured, and whether what it
// promises was held.
type Report struct {
	Head     string // stands above the table
	Folder   string // has configs and logs
	Breaches []string
	Rows     []Row
}

// Row is one scene: held, **not held**, printed or skipped.
type Row struct{ Scene, Measured, Verdict string }

const skipped = "skipped"

// Scene is what is played in a world, and what it promises.
type Scene[W any] struct {
	Name string
	Play func(ctx context.Context, w W, r *Report) error
}

// Play plays scenes, one after the other.
func Play[W any](ctx context.Context, w W, r *Report, scenes []Scene[W]) error {
	for _, s := range scenes {
		if err := s.Play(ctx, w, r); err != nil {
			return fmt.Errorf("%s: %w; %s has the logs", s.Name, err, r.Folder)
		}
	}
	return nil
}

// Add adds a row that is held unless Hold says otherwise.
func (r *Report) Add(scene, format string, args ...any) {
	r.Rows = append(r.Rows, Row{scene, fmt.Sprintf(format, args...), "held"})
}

// Print adds what is measured and not judged.
func (r *Report) Print(scene, format string, args ...any) {
	r.Rows = append(r.Rows, Row{scene, fmt.Sprintf(format, args...), "printed"})
}

// Skip adds a scene that this machine cannot play.
func (r *Report) Skip(scene, why string) { r.Rows = append(r.Rows, Row{scene, why, skipped}) }

// Hold breaks the scene's rows unless ok.
func (r *Report) Hold(ok bool, scene, format string, args ...any) {
	if ok {
		return
	}
	r.Breaches = append(r.Breaches, scene+": "+fmt.Sprintf(format, args...))
	for i := range r.Rows {
		if r.Rows[i].Scene == scene && r.Rows[i].Verdict != skipped {
			r.Rows[i].Verdict = "**not held**"
		}
	}
}

// Join adds the rows and breaches of another report, its scenes under a name.
func (r *Report) Join(name string, other *Report) {
	for _, x := range other.Rows {
		x.Scene = name + x.Scene
		r.Rows = append(r.Rows, x)
	}
	r.Breaches = append(r.Breaches, other.Breaches...)
}

// Write prints the table as Markdown, and each breach below it.
func (r *Report) Write(out io.Writer) {
	fmt.Fprintf(out, "%s\n\n| what | measured | |\n|---|---|---|\n", r.Head)
	for _, x := range r.Rows {
		fmt.Fprintf(out, "| %s | %s | %s |\n", x.Scene, x.Measured, x.Verdict)
	}
	for _, b := range r.Breaches {
		fmt.Fprintf(out, "\nBREACH %s\n", b)
	}
	if len(r.Breaches) > 0 {
		fmt.Fprintf(out, "\n%s has the configs and logs\n", r.Folder)
	}
}
