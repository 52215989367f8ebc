package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// page is a document whose tables stand between markers. Text around them is
// never touched.
type page struct {
	path, text string
}

// bareTitle begins a document that has nothing but tables.
const bareTitle = "# Policies side by side\n"

func openPage(path string) (*page, error) {
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &page{path: path, text: bareTitle}, nil
	case err != nil:
		return nil, err
	}
	return &page{path: path, text: string(text)}, nil
}

func opening(name string) string {
	target := "reproduce"
	if slices.Contains(namesOf(prefillBlocks), name) {
		target = "reproduce-prefill"
	}
	return "<!-- " + name + ": written by `make " + target + "` -->\n"
}

func closing(name string) string { return "<!-- end of " + name + " -->\n" }

// set puts a block between its markers.
func (p *page) set(bl block, text string) error {
	text = strings.TrimSpace(text) + "\n"
	before, rest, found := strings.Cut(p.text, opening(bl.name))
	_, after, closed := strings.Cut(rest, closing(bl.name))
	if !found && strings.HasPrefix(p.text, bareTitle) {
		p.text += "\n## " + bl.title + "\n\n" + opening(bl.name) + text + closing(bl.name)
		return nil
	}
	if !found || !closed {
		return fmt.Errorf("%s has no place for the table: put the lines %q and %q there, or write to a file that does not exist", p.path,
			strings.TrimSpace(opening(bl.name)), strings.TrimSpace(closing(bl.name)))
	}
	p.text = before + opening(bl.name) + text + closing(bl.name) + after
	return nil
}

// save replaces the file, so that a reader sees the old one or the new one.
func (p *page) save() error {
	if err := os.MkdirAll(filepath.Dir(p.path), 0o755); err != nil {
		return err
	}
	temp := p.path + ".new"
	err := os.WriteFile(temp, []byte(p.text), 0o644)
	if err == nil {
		err = os.Rename(temp, p.path)
	}
	if err != nil {
		_ = os.Remove(temp) // where there is one; err says the rest
	}
	return err
}

// table is a Markdown table: the first column is text, the others are numbers.
type table struct {
	head []string
	rows [][]string
	text int // columns beyond the first that are text, the last ones
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) String() string {
	var b strings.Builder
	line := func(cells []string) { b.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	line(t.head)
	b.WriteString("|---|")
	for i := 1; i < len(t.head); i++ {
		if i >= len(t.head)-t.text {
			b.WriteString("---|")
		} else {
			b.WriteString("--:|")
		}
	}
	b.WriteByte('\n')
	for _, r := range t.rows {
		line(r)
	}
	return b.String()
}
