package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// pages are the texts for people, by their path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "configs/*.yaml", "configs/*/*.yaml", "configs/kubernetes/*/*.yaml"} {
		files, err := filepath.Glob(filepath.Join("../..", pattern))
		require.NoError(t, err)
		for _, f := range files {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			all[f] = string(text)
		}
	}
	require.Greater(t, len(all), 20)
	return all
}

var (
	metricName = regexp.MustCompile("evenkeel_[a-z0-9_]+([*'`]|\\{[^}`]*\\})?")
	metricRow  = regexp.MustCompile("(?m)^\\| `(evenkeel_[a-z0-9_]+)` \\| ([a-z]+) \\|([^|]*)\\|")
	labelName  = regexp.MustCompile("([a-z_]+)(?:!?=~?\"|,|$)")
)

// Who copies the name of a metric from a page finds that metric. docs/metrics.md
// itself is held against the registry by a test of the gateway. A name may be a
// beginning where it ends in * or is what the runbook greps for.
func TestThePagesNameMetricsThatExist(t *testing.T) {
	all := pages(t)
	labels := map[string]string{}
	for _, row := range metricRow.FindAllStringSubmatch(all["../../docs/metrics.md"], -1) {
		labels[row[1]] = row[3]
		if row[2] == "histogram" {
			for _, part := range []string{"_bucket", "_sum", "_count"} {
				labels[row[1]+part] = row[3] + "`le`"
			}
		}
	}
	require.Greater(t, len(labels), 100)
	for page, text := range all {
		for line := range strings.Lines(text) {
			for _, m := range metricName.FindAllStringSubmatch(line, -1) {
				name := strings.TrimSuffix(m[0], m[1])
				known, ok := labels[name]
				begins := func(metric string) bool { return strings.HasPrefix(metric, name) }
				if !ok && (m[1] == "*" || strings.Contains(line, "`m ")) {
					for metric := range labels {
						ok = ok || begins(metric)
					}
				}
				require.True(t, ok, "%s: there is no metric %s: %s", page, name, line)
				if !strings.HasPrefix(m[1], "{") || known == "" {
					continue
				}
				for _, l := range labelName.FindAllStringSubmatch(strings.Trim(m[1], "{}"), -1) {
					ours := strings.Contains(known, "`"+l[1]+"`") || slices.Contains([]string{"job", "instance", "namespace"}, l[1])
					require.True(t, ours, "%s: %s has no label %s: %s", page, name, l[1], line)
				}
			}
		}
	}
}

var (
	inCode      = regexp.MustCompile("`(?:bin/)?(evenkeel [a-z][^`]*)`")
	placeholder = regexp.MustCompile(`^[A-Z]$`)
	unfinished  = regexp.MustCompile(`^(missing flags|expected )|got "EOL"`)
	quoted      = regexp.MustCompile(`'([^']*)'|"([^"]*)"|(\S+)`)
)

// wordsOf is a command line as a shell hands it over, up to a pipe or a comment.
func wordsOf(line string) (words []string) {
	for _, m := range quoted.FindAllStringSubmatch(line, -1) {
		word := m[1] + m[2] + m[3]
		switch {
		case slices.Contains([]string{"|", "&", "&&", ">", ">>"}, m[3]) || strings.HasPrefix(m[3], "#"):
			return words
		case placeholder.MatchString(word): // a number
			word = "1"
		}
		words = append(words, word)
	}
	return words
}

// Command lines of the pages are read by evenkeel as they stand. In the middle of
// a sentence one may lack what it needs, but has nothing that there is not.
func TestThePagesCommandLinesParse(t *testing.T) {
	race.Alone(t)
	n := 0
	for page, text := range pages(t) {
		if !strings.HasSuffix(page, ".md") || strings.HasSuffix(page, "CHANGELOG.md") {
			continue
		}
		fenced := false
		text = strings.ReplaceAll(text, "\\\n", " ")
		for line := range strings.Lines(text) {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				fenced = !fenced
				continue
			}
			var lines []string
			if command := strings.TrimPrefix(strings.TrimSpace(line), "bin/"); fenced && strings.HasPrefix(command, "evenkeel ") {
				lines = append(lines, command)
			}
			for _, m := range inCode.FindAllStringSubmatch(line, -1) {
				if !strings.Contains(m[1], " [") { // what there is to write, not a line
					lines = append(lines, m[1])
				}
			}
			for _, one := range lines {
				err := parses(wordsOf(one)[1:])
				if err != nil && !fenced && unfinished.MatchString(err.Error()) {
					err = nil
				}
				require.NoError(t, err, "%s: %s", page, one)
				n++
			}
		}
	}
	require.Greater(t, n, 40)
}

func parses(args []string) error {
	var cli commands
	parser, err := kong.New(&cli, helpVariables(), kong.Exit(func(int) {}))
	if err != nil {
		return err
	}
	if len(args) > 0 && isServeFlag(parser.Model.Node, args[0]) {
		args = append([]string{"serve"}, args...)
	}
	_, err = parser.Parse(spreadLists(args, listFlags(parser.Model.Node, args)))
	return err
}

var apiCall = regexp.MustCompile(`curl .* -d `)

// The admin listener takes a body that is called JSON and nothing else, since a
// browser sends others for any page.
func TestThePagesCallsOfOperatorsAreTaken(t *testing.T) {
	for page, text := range pages(t) {
		text = regexp.MustCompile(`\\\n#?`).ReplaceAllString(text, " ")
		for line := range strings.Lines(text) {
			if apiCall.MatchString(line) && !strings.Contains(line, "/v1/") {
				require.Contains(t, line, "application/json", "%s: 415 without a content type", page)
			}
		}
	}
}
