// Package page writes tables into a page, between its markers. A table is data: the policies that
// were run in a scenario, each once (runs.go), and the columns that show them (table.go). The text
// of a page stands in the page.
package page

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
)

// Block is a part of a document: a few tables that answer one question. A book
// makes them.
type Block[B Book] struct {
	Name, Title string
	Tables      func(B) string
}

// Book makes tables. It goes on after an error, with tables that nobody will see.
type Book interface {
	Err() error // the first
}

// Names are those of blocks.
func Names[B Book](blocks []Block[B]) (names []string) {
	for _, b := range blocks {
		names = append(names, b.Name)
	}
	return names
}

// Choose returns the blocks of a list of names; of none it is all.
func Choose[B Book](blocks []Block[B], only []string) ([]Block[B], error) {
	there := Names(blocks)
	for _, name := range only {
		if !slices.Contains(there, name) {
			return nil, fmt.Errorf("%s: there are %s", name, strings.Join(there, ", "))
		}
	}
	return slices.DeleteFunc(slices.Clone(blocks), func(b Block[B]) bool { return only != nil && !slices.Contains(only, b.Name) }), nil
}

// Fill makes the blocks and, when all are there, writes them into a document.
// target is what `make` is told to make them again.
func Fill[B Book](path, target string, book B, blocks []Block[B]) error {
	d, err := openDocument(path, target)
	if err != nil {
		return err
	}
	for _, b := range blocks {
		text := b.Tables(book)
		if err := book.Err(); err != nil {
			return fmt.Errorf("table %s: %w", b.Name, err)
		}
		if err := d.set(b.Name, b.Title, text); err != nil {
			return err
		}
	}
	return d.save()
}

// Write writes one block that is there already.
func Write(path, target, name, title, text string) error {
	d, err := openDocument(path, target)
	if err != nil {
		return err
	}
	if err := d.set(name, title, text); err != nil {
		return err
	}
	return d.save()
}

// Show writes one block into a document, or prints it if path is empty.
func Show(out io.Writer, path, target, name, title, text string) error {
	if path == "" {
		_, err := fmt.Fprintln(out, text)
		return err
	}
	return Write(path, target, name, title, text)
}

// document has tables between markers. Text around them is never touched.
type document struct {
	path, target, text string
}

// bareTitle begins a document that has nothing but tables.
const bareTitle = "# Policies side by side\n"

func openDocument(path, target string) (*document, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = []byte(bareTitle), nil
	}
	return &document{path, target, string(text)}, err
}

// Markers are the lines before and behind a block.
func Markers(name, target string) (opening, closing string) {
	return "<!-- " + name + ": written by `make " + target + "` -->\n", "<!-- end of " + name + " -->\n"
}

// set puts a block between its markers.
func (d *document) set(name, title, text string) error {
	opening, closing := Markers(name, d.target)
	text = opening + strings.TrimSpace(text) + "\n" + closing
	before, rest, found := strings.Cut(d.text, opening)
	_, after, closed := strings.Cut(rest, closing)
	if !found && strings.HasPrefix(d.text, bareTitle) {
		d.text += "\n## " + title + "\n\n" + text
		return nil
	}
	if !found || !closed {
		return fmt.Errorf("%s has no place for the table: put the lines %q and %q there, or write to a file that does not exist", d.path,
			strings.TrimSpace(opening), strings.TrimSpace(closing))
	}
	d.text = before + text + after
	return nil
}

// save replaces the file, so that a reader sees the old one or the new one.
func (d *document) save() error {
	if err := os.MkdirAll(filepath.Dir(d.path), 0o755); err != nil {
		return err
	}
	return report.Replace(d.path, []byte(d.text))
}
