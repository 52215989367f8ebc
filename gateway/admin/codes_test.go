package admin

import (
	"go/ast"
	"go/token"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var codeRow = regexp.MustCompile("(?m)^\\| (\\d{3}) \\| `([a-z_]+)` \\|")

// codes are the rows of a tag's table, "status code".
func codes(doc *page, tag string) (all []string) {
	for _, of := range doc.Tags {
		if of.Name != tag {
			continue
		}
		for _, m := range codeRow.FindAllStringSubmatch(of.Description, -1) {
			all = append(all, m[1]+" "+m[2])
		}
	}
	return all
}

// Every code of an error stands in the document with its status, and every one
// that stands there is in the source.
func TestOpenAPIHasEveryErrorCode(t *testing.T) {
	doc := documented(t)
	operator := codesIn(t, "gateway/admin")
	operator = append(operator, codesIn(t, "gateway/live")...)
	operator = append(operator, codesIn(t, "gateway/fleetcall")...)
	require.ElementsMatch(t, unique(operator), codes(doc, operators))

	client := codesIn(t, "gateway/admission", "peers.go")
	for _, pkg := range []string{"gateway/request", "gateway/failure", "gateway/prompt", "gateway/openai", "gateway/edge",
		"gateway/passthrough"} {
		client = append(client, codesIn(t, pkg)...)
	}
	require.ElementsMatch(t, unique(client), codes(doc, clients))
}

func unique(all []string) []string {
	slices.Sort(all)
	return slices.Compact(all)
}

// codesIn collects what a package hands to those that make errors, as "status
// code". Files of another listener are left out.
func codesIn(t *testing.T, pkg string, without ...string) (all []string) {
	t.Helper()
	c := constants(t, "geo", "gateway/openai", pkg)
	for _, file := range sourcesBut(t, filepath.Join(repository, pkg), without...) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				args := n.Args
				switch nameOf(n.Fun) {
				case "NewError":
					all = append(all, c.pairs(args[0], args[1])...)
				case "fail":
					if len(args) == 4 { // of this package; the gateway's writes an error it was given
						all = append(all, c.pairs(args[1], args[2])...)
					}
				case "Unavailable":
					all = append(all, c.pairs(status(http.StatusServiceUnavailable), args[0])...)
				case "Stream":
					all = append(all, c.pairs(status(http.StatusBadGateway), args[0])...)
				case "badRequest":
					all = append(all, c.pairs(status(http.StatusBadRequest), args[0])...)
				}
			case *ast.CompositeLit:
				all = append(all, c.literal(n)...)
			}
			return true
		})
	}
	return all
}

func status(n int) ast.Expr { return &ast.BasicLit{Kind: token.INT, Value: strconv.Itoa(n)} }

// nameOf is the last part of a name: NewError of openai.NewError.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// consts are string constants by name.
type consts map[string]string

func constants(t *testing.T, packages ...string) consts {
	t.Helper()
	all := consts{}
	for _, pkg := range packages {
		for _, file := range sources(t, filepath.Join(repository, pkg)) {
			ast.Inspect(file, func(n ast.Node) bool {
				if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == len(v.Names) {
					for i, name := range v.Names {
						if lit, ok := v.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
							all[name.Name], _ = strconv.Unquote(lit.Value)
						}
					}
				}
				return true
			})
		}
	}
	return all
}

// literal finds status and code in openai.Error{...} and edge.Refusal{...}.
func (c consts) literal(n *ast.CompositeLit) []string {
	if name := nameOf(n.Type); name != "Error" && name != "Refusal" {
		return nil
	}
	var where, code ast.Expr
	for i, e := range n.Elts {
		kv, named := e.(*ast.KeyValueExpr)
		switch {
		case named && nameOf(kv.Key) == "Status":
			where = kv.Value
		case named && nameOf(kv.Key) == "Code":
			code = kv.Value
		case !named && i == 0:
			where = e
		case !named && i == 1:
			code = e
		}
	}
	if where == nil || code == nil {
		return nil
	}
	return c.pairs(where, code)
}

// pairs is "status code" where both are written down. A side in front of a code
// stands for both.
func (c consts) pairs(where, code ast.Expr) []string {
	n := c.status(where)
	if sum, ok := code.(*ast.BinaryExpr); ok {
		tail, _ := strconv.Unquote(sum.Y.(*ast.BasicLit).Value)
		return []string{n + " prefill" + tail, n + " decode" + tail, n + " engine" + tail}
	}
	text := c[nameOf(code)]
	if lit, ok := code.(*ast.BasicLit); ok {
		text, _ = strconv.Unquote(lit.Value)
	}
	switch {
	case n == "", text == "", text == "engine_refused", text == "peer_returned": // an engine's own words; what only receipts say
		return nil
	}
	return []string{n + " " + text}
}

// status reads 400, http.StatusBadRequest and journal.StatusClientClosed.
func (c consts) status(e ast.Expr) string {
	if lit, ok := e.(*ast.BasicLit); ok {
		return lit.Value
	}
	name := nameOf(e)
	if name == "StatusClientClosed" {
		return "499"
	}
	for n := 100; n < 600; n++ {
		if text := http.StatusText(n); text != "" && "Status"+strings.NewReplacer(" ", "", "-", "").Replace(text) == name {
			return strconv.Itoa(n)
		}
	}
	return ""
}

// sourcesBut is sources without some files.
func sourcesBut(t *testing.T, dir string, without ...string) (files []*ast.File) {
	t.Helper()
	for name, f := range sources(t, dir) {
		if !slices.Contains(without, filepath.Base(name)) {
			files = append(files, f)
		}
	}
	return files
}
