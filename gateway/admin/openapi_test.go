package admin

import (
	"flag"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"

	"evenkeel/gateway"
	"evenkeel/gateway/fleetcall"
	"evenkeel/gateway/live"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/geo"
	"evenkeel/prefill"
)

var update = flag.Bool("update", false, "write the schemas of Go types into docs/openapi.yaml")

const (
	document  = repository + "/docs/openapi.yaml"
	fromTypes = "    # From here on made from the Go types: go test ./gateway/admin -run TestOpenAPI -update\n"
)

func TestOpenAPISchemasAreThoseOfTheTypes(t *testing.T) {
	loose := []reflect.Type{reflect.TypeFor[newWorker](), reflect.TypeFor[geo.Tuning](), reflect.TypeFor[fleetcall.Call]()}
	strict := []reflect.Type{
		reflect.TypeFor[gateway.Status](), reflect.TypeFor[reload.Reload](), reflect.TypeFor[live.Document](), reflect.TypeFor[live.History](),
		reflect.TypeFor[live.Strip](),
		reflect.TypeFor[prefill.Overview](), reflect.TypeFor[prefill.Scored](), reflect.TypeFor[prefill.HotspotClass](),
		reflect.TypeFor[receipt.Receipt](), reflect.TypeFor[regions](),
		reflect.TypeFor[fleetcall.Result](), reflect.TypeFor[geo.Status](),
		reflect.TypeFor[geo.Receipt](),
	}
	regenerate(t, document, fromTypes, generated(t, loose, strict), *update)
}

// page is what these tests read of the document. bench/outside/api validates it, and holds answers
// against it.
type page struct {
	Tags  []struct{ Name, Description string }
	Paths map[string]item
}

type item struct {
	Servers                []struct{ URL string }
	Get, Put, Post, Delete *operation
}

type operation struct{ Tags []string }

// operations has them by their methods.
func (i item) operations() map[string]*operation {
	all := map[string]*operation{http.MethodGet: i.Get, http.MethodPut: i.Put, http.MethodPost: i.Post, http.MethodDelete: i.Delete}
	maps.DeleteFunc(all, func(_ string, op *operation) bool { return op == nil })
	return all
}

func documented(t *testing.T) *page {
	t.Helper()
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	doc := &page{}
	require.NoError(t, yaml.Unmarshal(text, doc))
	return doc
}

// The tags, which say whose listener a path is on.
const clients, operators = "For clients", "For operators"

// operations lists what the document has of a listener, as GET /path.
func operations(doc *page, tag string) (all []string) {
	for path, item := range doc.Paths {
		for method, op := range item.operations() {
			if slices.Contains(op.Tags, tag) {
				all = append(all, method+" "+path)
			}
		}
	}
	return all
}

func TestOpenAPIHasEveryRouteAndNoOther(t *testing.T) {
	doc := documented(t)
	g, _ := nowhere(t)
	h := &handler{g: g}
	var routes []string
	for pattern := range h.open() {
		routes = append(routes, strings.TrimSuffix(pattern, "{$}"))
	}
	for pattern := range h.guarded(http.NotFoundHandler()) {
		routes = append(routes, strings.Replace(pattern, "...}", "}", 1))
	}
	require.ElementsMatch(t, routes, operations(doc, operators))
	// Both listeners have this path, and a path is in the document once.
	const twice = "GET /metrics"
	require.Contains(t, h.g.Routes(), twice)
	require.ElementsMatch(t, slices.DeleteFunc(h.g.Routes(), func(route string) bool { return route == twice }), operations(doc, clients))
	for path, item := range doc.Paths {
		for method, op := range item.operations() {
			require.Len(t, op.Tags, 1, "%s %s", method, path)
			require.Equal(t, op.Tags[0] == operators, len(item.Servers) == 1, "%s: who has which server", path)
		}
	}
}

// What linters of OpenAPI call an error, redocly's among them, breaks the
// generators that read the document.
func TestOpenAPIPassesLinters(t *testing.T) {
	raw, err := os.ReadFile(document)
	require.NoError(t, err)
	for path := range documented(t).Paths {
		require.False(t, strings.HasSuffix(path, "/") && path != "/", "%s ends with a slash", path)
	}
	var doc any
	require.NoError(t, yaml.Unmarshal(raw, &doc))
	var walk func(where string, v any)
	walk = func(where string, v any) {
		switch v := v.(type) {
		case map[string]any:
			if v["nullable"] == true {
				require.Contains(t, v, "type", "%s: nullable says nothing without a type", where)
			}
			for k, x := range v {
				walk(where+"/"+k, x)
			}
		case []any:
			for _, x := range v {
				walk(where, x)
			}
		}
	}
	walk("", doc)
	redocly, err := exec.LookPath("redocly")
	if err != nil {
		t.Log("redocly is not installed (npm install -g @redocly/cli): its two rules that this document broke were checked, and no other")
		return
	}
	out, err := exec.CommandContext(t.Context(), redocly, "lint", document).CombinedOutput()
	require.NoError(t, err, "%s", out)
}
