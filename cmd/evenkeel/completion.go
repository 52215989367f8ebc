package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"evenkeel/bench/sim/regions"
	"evenkeel/dispatcher/policy"
	"evenkeel/mooncake"
)

// completionCmd prints a script for a shell. The script completes command lines of evenkeel by
// running `evenkeel complete` (completeCmd).
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"Write it for this shell: bash, zsh or fish."`
}

// Help returns the text that `completion --help` prints below its first line.
func (completionCmd) Help() string {
	return `The script asks evenkeel itself, so it stays right when evenkeel is replaced.

    bash: source <(evenkeel completion bash)       or into /etc/bash_completion.d/evenkeel
    zsh:  source <(evenkeel completion zsh)        or as _evenkeel into a folder of $fpath
    fish: evenkeel completion fish | source        or into ~/.config/fish/completions/evenkeel.fish`
}

// Run prints the script for the shell that the argument names.
func (c completionCmd) Run(std streams) error {
	_, err := fmt.Fprint(std.out, completionScripts[c.Shell])
	return err
}

// completionScripts has a script for each shell. A script runs `evenkeel complete` with the words
// up to the cursor, the unfinished word last. `evenkeel complete` prints one possible word per
// line. The line :files means that names of files are possible, too.
var completionScripts = map[string]string{
	"bash": `_evenkeel() {
    local cur=${COMP_LINE:0:COMP_POINT} words word
    read -ra words <<<"$cur"
    [[ $cur == *[[:space:]] ]] && words+=("")
    local last=${words[-1]}
    local kept=${last%"${last##*[=:]}"} # bash takes = and : for the ends of words
    COMPREPLY=()
    while IFS= read -r word; do
        if [[ $word == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "${last#--*=}")
        else
            COMPREPLY+=("${word#"$kept"}")
        fi
    done < <("${words[0]}" complete -- "${words[@]:1}" 2>/dev/null)
}
complete -F _evenkeel evenkeel
`,
	"zsh": `#compdef evenkeel
_evenkeel() {
    local -a answers
    answers=("${(@f)$("${words[1]}" complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if (( ${answers[(Ie):files]} )); then
        answers=("${(@)answers:#:files}")
        [[ $PREFIX == --*=* ]] && compset -P 1 '*='
        _files
    fi
    (( ${#answers} )) && [[ -n ${answers[1]} ]] && compadd -Q -- "${answers[@]}"
}
if [[ $funcstack[1] == _evenkeel ]]; then _evenkeel "$@"; else compdef _evenkeel evenkeel; fi
`,
	"fish": `function __evenkeel_complete
    set -l words (commandline -opc) (commandline -ct)
    for answer in ($words[1] complete -- $words[2..-1] 2>/dev/null)
        if test "$answer" = :files
            set -l flag (string match -r -- '^--[^=]*=' $words[-1])
            for path in (__fish_complete_path (string replace -- "$flag" '' $words[-1]))
                echo "$flag$path"
            end
        else
            echo $answer
        end
    end
end
complete -c evenkeel -f -a '(__evenkeel_complete)'
`,
}

// completeCmd is the command that the scripts of completionScripts run. It prints the words that
// the unfinished word can become, one per line.
type completeCmd struct {
	Words []string `arg:"" optional:"" passthrough:"" help:"Words of the command line after the program's name; the last is completed."`
}

// Run prints the words that the last word can become. The scripts write -- before the words, so
// that kong reads no flags from them.
func (c completeCmd) Run(ctx *kong.Context, std streams) error {
	words := c.Words
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	for _, w := range complete(ctx.Model.Node, words) {
		if _, err := fmt.Fprintln(std.out, w); err != nil {
			return err
		}
	}
	return nil
}

// completeFiles is the line that asks the shell to complete names of files.
const completeFiles = ":files"

// complete returns the words that the last of words, which is unfinished, can become. node
// describes evenkeel's command line.
func complete(node *kong.Node, words []string) []string {
	if len(words) == 0 {
		words = []string{""}
	}
	unfinished := words[len(words)-1]
	node, awaiting := readFinished(node, words[:len(words)-1])
	switch name, value, hasValue := strings.Cut(unfinished, "="); {
	case strings.HasPrefix(unfinished, "-") && hasValue: // --name=VALUE in one word
		return prependToAll(name+"=", valuesOf(findFlag(node, name), value))
	case strings.HasPrefix(unfinished, "-"):
		return withPrefix(unfinished, flagNames(node))
	case awaiting != nil:
		return valuesOf(awaiting, unfinished)
	default:
		return completionsFor(node, unfinished)
	}
}

// readFinished reads the finished words of a command line. It returns the node of the command that
// they name, and the flag whose value the next word is; nil: there is none.
func readFinished(node *kong.Node, finished []string) (command *kong.Node, awaiting *kong.Flag) {
	for _, w := range finished {
		switch {
		case strings.HasPrefix(w, "-"):
			name, _, hasValue := strings.Cut(w, "=")
			// A command line may begin with a flag of serve instead of a command: see isServeFlag.
			if awaiting = findFlag(node, name); awaiting == nil && node.Parent == nil {
				if f := findFlag(subcommandOf(node, "serve"), name); f != nil {
					node, awaiting = subcommandOf(node, "serve"), f
				}
			}
			isSwitch := awaiting != nil && awaiting.IsBool()
			if hasValue || isSwitch { // the next word is not a value of this flag
				awaiting = nil
			}
		case awaiting != nil:
			if !awaiting.IsSlice() { // a list of values ends only at the next flag
				awaiting = nil
			}
		default: // a command, or an argument, which changes nothing
			if child := subcommandOf(node, w); child != nil {
				node = child
			}
		}
	}
	return node, awaiting
}

// completionsFor returns the commands below a node that begin with unfinished or, if there is no
// such command, the values of the node's argument.
func completionsFor(at *kong.Node, unfinished string) []string {
	var list []string
	for _, c := range at.Children {
		if c.Type == kong.CommandNode && !c.Hidden {
			list = append(list, c.Name)
		}
	}
	list = withPrefix(unfinished, list)
	if len(list) > 0 || len(at.Positional) == 0 {
		return list
	}
	if enum := at.Positional[0].Enum; enum != "" {
		return withPrefix(unfinished, strings.Split(enum, ","))
	}
	return []string{completeFiles} // an argument without a list of values is the name of a file
}

// subcommandOf returns the command with this name or alias directly below a node; nil: there is
// none.
func subcommandOf(at *kong.Node, name string) *kong.Node {
	for _, c := range at.Children {
		if c.Name == name || slices.Contains(c.Aliases, name) {
			return c
		}
	}
	return nil
}

// findFlag returns the flag of a node that a word such as --name or -n stands for; nil: there is
// none. A node with a default command also has the flags of that command.
func findFlag(at *kong.Node, word string) *kong.Flag {
	for _, group := range at.AllFlags(false) {
		for _, f := range group {
			isShort := f.Short != 0 && word == "-"+string(f.Short)
			isAlias := slices.Contains(f.Aliases, strings.TrimPrefix(word, "--"))
			if word == "--"+f.Name || isShort || isAlias {
				return f
			}
		}
	}
	if at.DefaultCmd != nil {
		return findFlag(at.DefaultCmd, word)
	}
	return nil
}

// flagNames returns the flags of a node as words of a command line, including the --no- form of
// flags that have one.
func flagNames(at *kong.Node) (names []string) {
	if at.DefaultCmd != nil { // flags behind the node belong to its default command
		at = at.DefaultCmd
	}
	const withoutHidden = true
	for _, group := range at.AllFlags(withoutHidden) {
		for _, f := range group {
			names = append(names, "--"+f.Name)
			isNegatable := f.Negated || f.Tag != nil && f.Tag.Negatable != ""
			if isNegatable {
				names = append(names, "--no-"+f.Name)
			}
		}
	}
	return names
}

// valuesOf returns the values of a flag that begin with unfinished, if evenkeel can list its
// values.
func valuesOf(f *kong.Flag, unfinished string) []string {
	if f == nil { // the flag is unknown
		return nil
	}
	if f.Enum != "" { // the allowed values, with commas between them
		return withPrefix(unfinished, strings.Split(f.Enum, ","))
	}
	var list []string
	switch f.Name {
	case "policy":
		list = policy.Names()
	case "policies": // a list with commas, of which only the last item is unfinished
		finished := unfinished[:strings.LastIndexByte(unfinished, ',')+1]
		return prependToAll(finished, withPrefix(unfinished[len(finished):], policy.Names()))
	case "connector":
		list = mooncake.Connectors()
	case "log-level":
		list = []string{"debug", "info", "warn", "error"}
	case "preset":
		list = regions.Presets()
	}
	list = withPrefix(unfinished, list)
	if p := f.PlaceHolder; strings.HasPrefix(p, "FILE") || p == "DIR" { // the value may also be a path
		list = append(list, completeFiles) // the shell itself completes names of files
	}
	return list
}

// withPrefix returns the words of a list that begin with a prefix.
func withPrefix(prefix string, list []string) (matching []string) {
	for _, s := range list {
		if strings.HasPrefix(s, prefix) {
			matching = append(matching, s)
		}
	}
	return matching
}

// prependToAll puts a prefix before every word of a list, except completeFiles, which must stay as
// it is for the shell.
func prependToAll(prefix string, list []string) []string {
	for i, s := range list {
		if s != completeFiles {
			list[i] = prefix + s
		}
	}
	return list
}
