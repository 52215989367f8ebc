package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// arrow goes from a file to another one of its package that declares something which the first file
// uses: a function, a type, a variable, a constant or a method. A method uses its receiver's type.
type arrow struct{ from, to string }

// A reader of a package starts with its first file, and finds what that file uses below it. So the
// files of each package of the product have an order in which at most one arrow goes back up, or
// fewer than a tenth of all.
func TestFilesOfAPackageHaveAnOrder(t *testing.T) {
	race.Alone(t)
	for pkg, arrows := range arrowsOfProduct(t) {
		back := backUp(slices.Collect(maps.Keys(arrows)))
		if len(back) > 1 && 10*len(back) >= len(arrows) {
			t.Errorf("%s: %d of %d arrows between its files go back up. Move what is used into a file further down:", pkg, len(back), len(arrows))
			for _, a := range back {
				t.Logf("  %s uses %s of %s", a.from, strings.Join(slices.Sorted(maps.Keys(arrows[a])), ", "), a.to)
			}
		}
	}
}

// A row is a package of three files or four. The first letter of an arrow uses the second one.
func TestArrowsBackUpAreTheFewest(t *testing.T) {
	for name, tt := range map[string]struct {
		arrows string
		back   int
	}{
		"no file uses another one":                      {"", 0},
		"a chain goes down, in whatever order it is":    {"cb ba dc", 0},
		"two files that use each other":                 {"ab ba", 1},
		"a ring is cut once":                            {"ab bc cd da", 1},
		"two rings that share an arrow are cut there":   {"ab bc ca bd da", 1},
		"two rings that share a file are cut twice":     {"ab ba ac ca", 2},
		"each file uses each other":                     {"ab ba ac ca bc cb", 3},
		"what a file below uses does not count as back": {"ab ac ad bc bd cd", 0},
	} {
		var arrows []arrow
		for _, a := range strings.Fields(tt.arrows) {
			arrows = append(arrows, arrow{a[:1], a[1:]})
		}
		assert.Len(t, backUp(arrows), tt.back, name)
	}
}

// arrowsOfProduct are the arrows of each package of both modules but those of the first one below
// bench, with the names that each arrow stands for.
func arrowsOfProduct(t *testing.T) map[string]map[arrow]map[string]bool {
	t.Helper()
	all := map[string]map[arrow]map[string]bool{}
	for _, p := range product(t) {
		found := map[arrow]map[string]bool{}
		for id, obj := range p.uses {
			if obj.Pkg() != p.Package || obj.Parent() != p.Scope() && !isMethod(obj) {
				continue
			}
			a := arrow{p.file(id.Pos()), p.file(obj.Pos())}
			if a.from == a.to {
				continue
			}
			if found[a] == nil {
				found[a] = map[string]bool{}
			}
			found[a][obj.Name()] = true
		}
		all[strings.TrimPrefix(p.Path(), "evenkeel/")] = found
	}
	return all
}

// typed is a package of the product with what its identifiers mean.
type typed struct {
	*types.Package
	fset *token.FileSet
	uses map[*ast.Ident]types.Object

	ofTests bool // only tests import it
}

// file is the name of the file that a position is in.
func (c *typed) file(at token.Pos) string { return filepath.Base(c.fset.Position(at).Filename) }

// product is all packages of evenkeel but those of bench, without their tests.
func product(t *testing.T) (all []typed) {
	t.Helper()
	type listed struct {
		ImportPath, Dir, Export string
		GoFiles, Imports        []string
		Module                  *struct{ Main bool }
	}
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles,Imports,Module", "work")
	list.Dir, list.Env = filepath.Join("..", ".."), append(os.Environ(), "CGO_ENABLED=0") // as `make build` has compiled it
	out, err := list.Output()
	require.NoError(t, err)
	exports, imported := map[string]string{}, map[string]bool{}
	var own []listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		exports[p.ImportPath] = p.Export
		for _, path := range p.Imports {
			imported[path] = true
		}
		if p.Module != nil && p.Module.Main &&
			(!strings.HasPrefix(p.ImportPath, "evenkeel/bench/") || strings.HasPrefix(p.ImportPath, "evenkeel/bench/outside/")) {
			own = append(own, p)
		}
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("%s is not compiled", path)
		}
		return os.Open(exports[path])
	})
	for _, p := range own {
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			files = append(files, f)
		}
		info := types.Info{Uses: map[*ast.Ident]types.Object{}}
		pkg, err := (&types.Config{Importer: imports}).Check(p.ImportPath, fset, files, &info)
		require.NoError(t, err)
		all = append(all, typed{
			Package: pkg, fset: fset, uses: info.Uses, ofTests: !imported[p.ImportPath] && pkg.Name() != "main",
		})
	}
	require.Greater(t, len(all), 50, "packages of the product")
	return all
}

// isMethod says whether a type has it as a method, not an interface.
func isMethod(obj types.Object) bool {
	fn, ok := obj.(*types.Func)
	return ok && fn.Signature().Recv() != nil && !types.IsInterface(fn.Signature().Recv().Type())
}

// backUp are the arrows that go back up in the best order of the files that a search finds. The
// search starts from several orders, always the same ones, and moves each file to where it is best
// until none moves.
func backUp(arrows []arrow) (fewest []arrow) {
	uses := map[arrow]bool{}
	seen := map[string]bool{}
	for _, a := range arrows {
		uses[a], seen[a.from], seen[a.to] = true, true, true
	}
	order := slices.Sorted(maps.Keys(seen))
	random := rand.New(rand.NewPCG(1, 1))
	for try := range 20 {
		for settleOrder(order, uses) {
		}
		var back []arrow
		for i, file := range order {
			for _, above := range order[:i] {
				if uses[arrow{file, above}] {
					back = append(back, arrow{file, above})
				}
			}
		}
		if try == 0 || len(back) < len(fewest) {
			fewest = back
		}
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	return fewest
}

// settleOrder moves each file once to where the fewest arrows go back, and says whether any has
// moved.
func settleOrder(order []string, uses map[arrow]bool) (moved bool) {
	for _, file := range slices.Clone(order) {
		i := slices.Index(order, file)
		rest := slices.Concat(order[:i], order[i+1:])
		at, cost, best := 0, 0, 0 // of the places in rest; the first one costs nothing, and the others are compared with it
		here := 0
		for j, other := range rest {
			if uses[arrow{file, other}] {
				cost++ // the other one is above it now
			}
			if uses[arrow{other, file}] {
				cost-- // and no longer uses what is above
			}
			if j+1 == i {
				here = cost
			}
			if cost < best {
				at, best = j+1, cost
			}
		}
		if best < here {
			copy(order, slices.Insert(rest, at, file))
			moved = true
		}
	}
	return moved
}
