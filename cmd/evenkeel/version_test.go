package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestTheVersionStandsInOnePlace: that is the first section of the changelog. make reads it there,
// and make release writes it into the chart and the packages.
func TestTheVersionStandsInOnePlace(t *testing.T) {
	const root = "../../"
	changelog, err := os.ReadFile(root + "CHANGELOG.md")
	require.NoError(t, err)
	top := regexp.MustCompile(`(?m)^## (.*)`).FindStringSubmatch(string(changelog))
	require.NotNil(t, top)
	require.Regexp(t, `^\d+\.\d+\.\d+$`, top[1], "the first section is named after a version")
	written := regexp.MustCompile(`(^|[^\d.])` + regexp.QuoteMeta(top[1]) + `($|[^\d.])`)
	require.True(t, written.MatchString("appVersion: v"+top[1]+"\n"))
	for _, place := range []string{"Makefile", "README.md", "docs/operate.md", "bench/tools", "bench/outside/image", "cmd", "configs"} {
		require.NoError(t, filepath.WalkDir(root+place, func(path string, file fs.DirEntry, err error) error {
			// The plug-in of vLLM is a package of its own, with its own version.
			if err != nil || file.IsDir() || strings.HasPrefix(path, root+"configs/vllm/") {
				return err
			}
			text, err := os.ReadFile(path)
			assert.False(t, written.Match(text), "%s has the version: let make release write it there", path)
			return err
		}))
	}
}

// TestCommitsBeforeAVersionHaveAnOrder runs what make names a build with in a repository of its
// own.
func TestCommitsBeforeAVersionHaveAnOrder(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is not installed")
	}
	script, err := os.ReadFile("../../bench/tools/release/version.sh")
	require.NoError(t, err)
	repository := t.TempDir()
	file := filepath.Join(repository, "bench/tools/release/version.sh")
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, script, 0o755))
	run := func(name string, args ...string) string {
		cmd := exec.Command(name, args...)
		cmd.Dir = repository
		// Only this repository and no settings of the user count.
		cmd.Env = append(os.Environ(), "GIT_DIR="+filepath.Join(repository, ".git"), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@localhost", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@localhost",
			"GIT_COMMITTER_DATE=2026-01-02T03:04:05+0900")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return strings.TrimSpace(string(out))
	}
	version := func() string { return run(file, "v1.2.3") }

	require.Equal(t, "-dev.0", version(), "there is no commit")
	run("git", "init", "-q")
	run("git", "add", ".")
	run("git", "commit", "-q", "-m", "first")
	require.Regexp(t, `^-dev\.20260101180405\.g[0-9a-f]{12}$`, version(), "the time is UTC")
	run("git", "tag", "v1.2.2")
	require.Contains(t, version(), "-dev.", "the tag of another version is none of this")
	run("git", "tag", "v1.2.3")
	require.Empty(t, version())
	require.NoError(t, os.WriteFile(file, append(script, "# changed\n"...), 0o755))
	require.Regexp(t, `^-dev\..*-dirty$`, version())
}
