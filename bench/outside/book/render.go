package main

import (
	"bytes"
	"fmt"
	"html/template"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	tables "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
)

// rendered is what became of a chapter's source.
type rendered struct {
	Title    string
	Body     template.HTML
	Sections []section
	links    []link
}

// A section is what a heading begins, for the page's own contents and the search.
type section struct {
	Level int    `json:"-"`
	ID    string `json:"id"`
	Name  string `json:"name"`
	Text  string `json:"text"`
}

// link is one to another page or a place in it.
type link struct{ page, anchor string }

func (r *rendered) has(anchor string) bool {
	return slices.ContainsFunc(r.Sections, func(s section) bool { return s.ID == anchor })
}

var markdown = goldmark.New(
	goldmark.WithExtensions(extension.GFM),
	goldmark.WithParserOptions(parser.WithAutoHeadingID()),
	goldmark.WithRendererOptions(html.WithXHTML()),
)

// picture matches an image that has a version for dark screens. It is the only HTML that a page may
// have.
var picture = regexp.MustCompile(`^<picture>\n *<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\n *<img src="([^"]+)" alt="([^"]*)">\n</picture>\n$`)

// render makes a page of Markdown. Links to chapters become links to pages, those
// to other files of the repository to copies beside the pages.
func (b *book) render(c *chapter, source []byte) (*rendered, error) {
	doc := markdown.Parser().Parse(text.NewReader(source),
		parser.WithContext(parser.NewContext(parser.WithIDs(&anchors{used: map[string]bool{}}))))
	r := &rendered{Title: c.Name}
	var comments []ast.Node // marks of those who write tables into the page
	pictures := map[*ast.HTMLBlock]string{}
	err := ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.HTMLBlock:
			if m := picture.FindSubmatch(n.Lines().Value(source)); m != nil {
				dark, err := b.follow(c, r, string(m[1]))
				if err != nil {
					return ast.WalkStop, err
				}
				light, err := b.follow(c, r, string(m[2]))
				pictures[n] = fmt.Sprintf(`<picture><source media="(prefers-color-scheme: dark)" srcset="%s" /><img src="%s" alt="%s" /></picture>`, dark, light, m[3])
				return ast.WalkContinue, err
			}
			if n.HTMLBlockType != ast.HTMLBlockType2 {
				return ast.WalkStop, fmt.Errorf("HTML in the text, which pages leave out: %.60s", n.Lines().Value(source))
			}
			comments = append(comments, n)
		case *ast.RawHTML:
			return ast.WalkStop, fmt.Errorf("HTML in the text, which pages leave out: %.60s", n.Segments.Value(source))
		case *ast.Heading:
			id, _ := n.AttributeString("id")
			anchor, _ := id.([]byte)
			r.Sections = append(r.Sections, section{Level: n.Level, ID: string(anchor), Name: words(n, source)})
			if n.Level == 1 {
				r.Title = words(n, source)
			}
		case *ast.Paragraph, *ast.TextBlock, *tables.TableCell:
			r.say(words(n, source))
		case *ast.FencedCodeBlock, *ast.CodeBlock:
			r.say(string(n.Lines().Value(source)))
		case *ast.Link:
			to, err := b.follow(c, r, string(n.Destination))
			n.Destination = []byte(to)
			return ast.WalkContinue, err
		case *ast.Image:
			to, err := b.follow(c, r, string(n.Destination))
			n.Destination = []byte(to)
			return ast.WalkContinue, err
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		return nil, err
	}
	for _, n := range comments {
		n.Parent().RemoveChild(n.Parent(), n)
	}
	for n, written := range pictures {
		image := ast.NewString([]byte(written))
		image.SetCode(true) // it is written as it is
		p := ast.NewParagraph()
		p.AppendChild(p, image)
		n.Parent().ReplaceChild(n.Parent(), n, p)
	}
	var out bytes.Buffer
	if err := markdown.Renderer().Render(&out, source, doc); err != nil {
		return nil, err
	}
	body := strings.NewReplacer("<table>", `<div class="wide"><table>`, "</table>", "</table></div>").Replace(out.String())
	r.Body = template.HTML(body) //nolint:gosec // of our own sources; raw HTML in them is not let through
	return r, nil
}

// say adds text to the section it stands in.
func (r *rendered) say(text string) {
	if n := len(r.Sections); n > 0 {
		r.Sections[n-1].Text += text + " "
	}
}

// follow tells where a link of a chapter leads in the book.
func (b *book) follow(c *chapter, r *rendered, destination string) (string, error) {
	u, err := url.Parse(destination)
	if err != nil {
		return "", err
	}
	if u.IsAbs() || u.Host != "" {
		return destination, nil
	}
	if u.Path == "" {
		r.links = append(r.links, link{c.Page, u.Fragment})
		return destination, nil
	}
	file := path.Join(path.Dir(c.source), u.Path)
	for _, other := range b.chapters {
		if other.source == file {
			r.links = append(r.links, link{other.Page, u.Fragment})
			u.Path = other.Page
			return u.String(), nil
		}
	}
	info, err := os.Stat(filepath.Join(b.root, filepath.FromSlash(file)))
	if err != nil || strings.HasPrefix(file, "..") {
		return "", fmt.Errorf("a link to %s, which is not in the repository", destination)
	}
	if info.IsDir() { // pages cannot list it
		if file = path.Join(file, "README.md"); !exists(filepath.Join(b.root, filepath.FromSlash(file))) {
			return "#", nil
		}
	}
	b.files[file] = true
	return copyOf(file), nil
}

// copyOf is where a file of the repository lies in the book. Go source is text
// there: a browser shows it, and Go does not take it for a package.
func copyOf(file string) string {
	if strings.HasSuffix(file, ".go") {
		file += ".txt"
	}
	return "files/" + file
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// words are a node's text without its marks.
func words(n ast.Node, source []byte) string {
	var s strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Text:
			s.Write(n.Segment.Value(source))
			if n.SoftLineBreak() || n.HardLineBreak() {
				s.WriteByte(' ')
			}
		case *ast.String:
			s.Write(n.Value)
		case *ast.AutoLink:
			s.Write(n.Label(source))
		}
		return ast.WalkContinue, nil
	})
	return s.String()
}

// anchors names headings as code forges do, so that a link works in both.
type anchors struct{ used map[string]bool }

// Generate implements parser.IDs.
func (a *anchors) Generate(value []byte, _ ast.NodeKind) []byte {
	base := strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, strings.TrimSpace(string(value)))
	id := base
	for n := 1; a.used[id]; n++ {
		id = base + "-" + strconv.Itoa(n)
	}
	a.used[id] = true
	return []byte(id)
}

// Put implements parser.IDs.
func (a *anchors) Put(value []byte) { a.used[string(value)] = true }
