package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestACompileSaysHowFarItIs(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("bash is not installed")
	}
	said, err := exec.Command("../../bench/tools/ci/counted.sh", "150", "bash", "-c",
		`for i in {1..120}; do echo pkg/$i; done >&2; echo "# pkg/120" >&2; echo "pkg/120/a.go:1:2: undefined: x" >&2; exit 3`).CombinedOutput()
	var failed *exec.ExitError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 3, failed.ExitCode(), "what the compiler returned")
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	require.Len(t, lines, 3, string(said))
	require.Regexp(t, `^100 of 150 packages compiled, \d+ s$`, lines[0])
	require.Equal(t, []string{"# pkg/120", "pkg/120/a.go:1:2: undefined: x"}, lines[1:])
}

// A command with other flags than make's compiles every package again.
func TestTheInstallationCompilesWithTheFlagsOfMake(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	require.NotRegexp(t, "go (build|install|run) ", string(readme))
	for _, page := range []string{"../../CONTRIBUTING.md", "../../docs/testing.md"} {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(text), "export CGO_ENABLED=0 GOFLAGS=-trimpath", page)
	}
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is not installed")
	}
	cmd := exec.Command("make", "-n", "test")
	cmd.Dir = "../.."
	said, err := cmd.Output()
	require.NoError(t, err)
	begin, tests := strings.Index(string(said), "The tests begin. They take about "), strings.Index(string(said), "go test ")
	require.True(t, begin >= 0 && begin < tests, "it says how long the tests take before it starts them:\n%s", said)
}

func TestAPackageThatItsOwnTestsHardlyRunFails(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("bash is not installed")
	}
	for line, complaint := range map[string]string{
		"ok  \tevenkeel/sse\t0.85s\tcoverage: 93.8% of statements":                 "",
		"ok  \tevenkeel/sse\t0.85s\tcoverage: 50.0% of statements":                 "",
		"ok  \tevenkeel/sse\t0.85s\tcoverage: 49.9% of statements":                 "evenkeel/sse: its own tests run 49.9% of its statements; at least half is wanted\n",
		"\tevenkeel/sse\t\tcoverage: 0.0% of statements":                           "evenkeel/sse: its own tests run 0% of its statements; at least half is wanted\n",
		"?   \tevenkeel/docs\t[no test files]":                                     "",
		"\tevenkeel/dispatcher/fakes\t\tcoverage: 0.0% of statements":              "",
		"ok  \tevenkeel/dispatcher/fakes\t1.0s\tcoverage: 60.0% of statements":     "evenkeel/dispatcher/fakes: its own tests run 60% of its statements: take it off the table of ARCHITECTURE.md\n",
		"--- FAIL: TestX (0.00s)\nFAIL\nFAIL\tevenkeel/sse\t0.85s\nFAIL":           "",
		"ok  \tevenkeel/socket\t0.1s\tcoverage: [no statements] [no tests to run]": "",
	} {
		var complaints strings.Builder
		cmd := exec.Command("../../bench/tools/ci/covered.sh")
		cmd.Stdin, cmd.Stderr = strings.NewReader(line+"\n"), &complaints
		said, err := cmd.Output()
		require.Equal(t, complaint == "", err == nil, line)
		require.Equal(t, line+"\n", string(said), "it passes on what it reads")
		require.Equal(t, complaint, complaints.String(), line)
	}
}

// The race detector does not run these packages in CI, so nothing in them, nor in their tests, may
// run beside something else.
func TestWhatIsNotRacedStartsNoGoroutine(t *testing.T) {
	text, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	_, alone, _ := strings.Cut(strings.ReplaceAll(string(text), "\\\n", " "), "\nALONE    := ")
	alone, _, _ = strings.Cut(alone, "\n")
	require.Greater(t, len(strings.Fields(alone)), 20)
	for _, folder := range strings.Fields(alone) {
		files, err := filepath.Glob(filepath.Join("..", "..", folder, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, folder)
		for _, path := range files {
			at := token.NewFileSet()
			file, err := parser.ParseFile(at, path, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			ast.Inspect(file, func(n ast.Node) bool {
				_, starts := n.(*ast.GoStmt)
				if s, ok := n.(*ast.SelectorExpr); ok {
					starts = s.Sel.Name == "Parallel" || s.Sel.Name == "Go" || s.Sel.Name == "AfterFunc"
				}
				if starts {
					t.Errorf("%s starts a goroutine: take %s off ALONE in Makefile", at.Position(n.Pos()), folder)
				}
				return true
			})
		}
	}
}
