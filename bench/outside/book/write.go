package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"html/template"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

//go:embed page.html assets
var look embed.FS

var pageTemplate = template.Must(template.ParseFS(look, "page.html"))

// view is what the template of a page sees.
type view struct {
	Book       string
	Version    string
	Chapters   []*chapter
	Here       *chapter
	Prev, Next *chapter
}

// write replaces the folder's pages.
func (b *book) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for i, c := range b.chapters {
		v := view{Book: b.title, Version: b.version, Chapters: b.chapters, Here: c}
		if i > 0 {
			v.Prev = b.chapters[i-1]
		}
		if i+1 < len(b.chapters) {
			v.Next = b.chapters[i+1]
		}
		var page bytes.Buffer
		if err := pageTemplate.ExecuteTemplate(&page, "page.html", v); err != nil {
			return err
		}
		if err := put(dir, c.Page, page.Bytes()); err != nil {
			return err
		}
	}
	for _, file := range slices.Sorted(maps.Keys(b.files)) {
		text, err := os.ReadFile(filepath.Join(b.root, filepath.FromSlash(file)))
		if err != nil {
			return err
		}
		if err := put(dir, copyOf(file), text); err != nil {
			return err
		}
	}
	if err := b.writeSearch(dir); err != nil {
		return err
	}
	assets, err := fs.Sub(look, "assets")
	if err != nil {
		return err
	}
	return fs.WalkDir(assets, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(assets, name)
		if err != nil {
			return err
		}
		return put(dir, name, text)
	})
}

// writeSearch writes every section's text as a script: a page that is opened as a
// file may not fetch another.
func (b *book) writeSearch(dir string) error {
	type found struct {
		Page  string `json:"page"`
		Title string `json:"title"`
		section
	}
	list := []found{}
	for _, c := range b.chapters {
		for _, s := range c.Sections {
			list = append(list, found{c.Page, c.Title, s})
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return put(dir, "search.js", append([]byte("const sections = "), append(text, ";\n"...)...))
}

func put(dir, name string, text []byte) error {
	file := filepath.Join(dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}
