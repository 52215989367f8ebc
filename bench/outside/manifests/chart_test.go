package manifests

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/kyaml/openapi"
	kyaml "sigs.k8s.io/kustomize/kyaml/yaml"
)

const chart = manifests + "/chart"

// rendered is what `helm template evenkeel` prints for the chart's values, one document
// for each object. The chart uses few of helm's functions, so that they stand here: the
// test needs no helm, and TestHelmRendersTheSame holds them against helm's own.
func rendered(t *testing.T, values map[string]any) (documents [][]byte) {
	t.Helper()
	all := map[string]any{}
	readYAML(t, chart+"/values.yaml", &all)
	maps.Copy(all, values)
	about := map[string]any{}
	readYAML(t, chart+"/Chart.yaml", &about)
	data := map[string]any{
		"Values":  all,
		"Chart":   map[string]any{"AppVersion": about["appVersion"]},
		"Release": map[string]any{"Name": "evenkeel", "Namespace": "default", "Service": "Helm"},
	}
	set := template.New("chart").Option("missingkey=error")
	execute := func(of *template.Template, data any) (string, error) {
		var b strings.Builder
		err := of.Execute(&b, data)
		return b.String(), err
	}
	set.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) { return execute(set.Lookup(name), data) },
		"tpl": func(text string, data any) (string, error) {
			of, err := template.Must(set.Clone()).New("text").Parse(text)
			if err != nil {
				return "", err
			}
			return execute(of, data)
		},
		"toYaml": func(v any) (string, error) {
			text, err := yaml.Marshal(v)
			return strings.TrimSuffix(string(text), "\n"), err
		},
		"nindent": func(n int, text string) string {
			pad := "\n" + strings.Repeat(" ", n)
			return pad + strings.ReplaceAll(text, "\n", pad)
		},
		"trim":      strings.TrimSpace,
		"quote":     func(v any) string { return `"` + strings.ReplaceAll(v.(string), `"`, `\"`) + `"` },
		"sha256sum": func(s string) string { sum := sha256.Sum256([]byte(s)); return hex.EncodeToString(sum[:]) },
		"int":       func(v any) int { n, _ := v.(uint64); return int(n) },
		"until": func(n int) (list []int) {
			for i := range n {
				list = append(list, i)
			}
			return list
		},
		"default": func(otherwise, v string) string {
			if v == "" {
				return otherwise
			}
			return v
		},
	})
	files, err := filepath.Glob(chart + "/templates/*")
	require.NoError(t, err)
	template.Must(set.ParseFiles(files...))
	for _, f := range files {
		if strings.HasSuffix(f, ".tpl") {
			continue
		}
		text, err := execute(set.Lookup(filepath.Base(f)), data)
		require.NoError(t, err)
		documents = append(documents, split(text)...)
	}
	return documents
}

// split cuts a stream of YAML into its documents, without those that are comments only.
func split(stream string) (documents [][]byte) {
	for text := range strings.SplitSeq(stream, "\n---") {
		if strings.Contains(text, "kind:") {
			documents = append(documents, []byte(text+"\n"))
		}
	}
	return documents
}

func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, into))
}

// TestTheChartMakesWhatTheBaseMakes compares the two, but for what only a chart has: a
// label with the release's name, the image's tag, and a checksum of the config where the
// base has a hash in its name.
func TestTheChartMakesWhatTheBaseMakes(t *testing.T) {
	base, of := applied(t, "base"), applied(t, "chart")
	pod := &of.proxy.Spec.Template
	require.NotEmpty(t, pod.Annotations["checksum/config"], "a change of the config rolls the pods")
	delete(pod.Annotations, "checksum/config")
	about := map[string]any{}
	readYAML(t, chart+"/Chart.yaml", &about)
	require.Equal(t, fmt.Sprint("evenkeel:", about["appVersion"]), pod.Spec.Containers[0].Image)
	pod.Spec.Containers[0].Image, pod.Spec.Containers[0].ImagePullPolicy = base.proxy.Spec.Template.Spec.Containers[0].Image, ""
	pod.Spec.Volumes[0].ConfigMap.Name = base.proxy.Spec.Template.Spec.Volumes[0].ConfigMap.Name
	require.Equal(t, core.ServiceTypeClusterIP, of.services[0].Spec.Type)
	of.services[0].Spec.Type = "" // which is the same
	of.policies[1].Name = strings.TrimPrefix(of.policies[1].Name, "evenkeel-")
	for _, same := range [][2]any{
		{base.proxy.Spec, of.proxy.Spec}, {specs(base), specs(of)}, {base.roles[0].Rules, of.roles[0].Rules},
		{base.bindings[0].RoleRef, of.bindings[0].RoleRef}, {base.bindings[0].Subjects, of.bindings[0].Subjects},
	} {
		require.Equal(t, withoutInstance(same[0]), withoutInstance(same[1]))
	}
	var configs [2]map[string]any // comments may differ
	for i, m := range []*manifest{base, of} {
		require.NoError(t, yaml.Unmarshal([]byte(m.configs[0].Data["evenkeel.yaml"]), &configs[i]))
	}
	require.Equal(t, configs[0], configs[1])
}

// specs are those of which a manifest has several, by name.
func specs(m *manifest) map[string]any {
	all := map[string]any{}
	for _, s := range m.services {
		all["Service "+s.Name] = s.Spec
	}
	for _, p := range m.policies {
		all["NetworkPolicy "+p.Name] = p.Spec
	}
	for _, b := range m.budgets {
		all["PodDisruptionBudget "+b.Name] = b.Spec
	}
	return all
}

// withoutInstance is an object as JSON without the label that only the chart sets.
func withoutInstance(of any) string {
	text, _ := json.MarshalIndent(of, "", " ")
	return regexp.MustCompile(`\s*"app.kubernetes.io/instance": "evenkeel",`).ReplaceAllString(string(text), "")
}

// TestTheChartFollowsItsValues sets those that the defaults leave empty.
func TestTheChartFollowsItsValues(t *testing.T) {
	m := &manifest{}
	for _, d := range rendered(t, map[string]any{
		"replicas": uint64(3), "secret": "other", "networkPolicy": false, "nodeSelector": map[string]any{"disk": "fast"},
		"imagePullSecrets": []any{map[string]any{"name": "registry"}}, "tolerations": []any{map[string]any{"operator": "Exists"}},
		"env": []any{map[string]any{"name": "ENGINE_KEY", "value": "k"}},
	}) {
		m.add(t, object(t, d))
	}
	pod := m.proxy.Spec.Template.Spec
	require.Contains(t, m.configs[0].Data["evenkeel.yaml"], "members: [evenkeel-0, evenkeel-1, evenkeel-2]")
	require.Empty(t, m.policies)
	require.Equal(t, "other", pod.Volumes[1].Secret.SecretName)
	require.Equal(t, map[string]string{"disk": "fast"}, pod.NodeSelector)
	require.Equal(t, "registry", pod.ImagePullSecrets[0].Name)
	require.Equal(t, core.TolerationOpExists, pod.Tolerations[0].Operator)
	require.Equal(t, "ENGINE_KEY", pod.Containers[0].Env[1].Name)
}

// TestHelmRendersTheSame asks helm itself, where it is installed (`make chart-check`).
func TestHelmRendersTheSame(t *testing.T) {
	helm, err := exec.LookPath(cmp.Or(os.Getenv("HELM"), "helm"))
	if err != nil {
		t.Skip("no helm here")
	}
	out, err := exec.CommandContext(t.Context(), helm, "template", "evenkeel", chart, "--kube-version", "1.34").Output()
	require.NoError(t, err)
	parse := func(documents [][]byte) (all []string) {
		for _, d := range documents {
			text, err := json.Marshal(object(t, d))
			require.NoError(t, err)
			all = append(all, string(text))
		}
		slices.Sort(all)
		return all
	}
	require.Equal(t, parse(rendered(t, nil)), parse(split("\n"+string(out))))
}

// TestTheAPIsSchemasTakeTheManifests holds base, reference and chart against the
// OpenAPI document of Kubernetes that kustomize brings: what is required is there, and each
// value has its type. That no field is unknown is what strict decoding finds.
func TestTheAPIsSchemasTakeTheManifests(t *testing.T) {
	n := 0
	for _, folder := range []string{"base", "reference", "chart"} {
		for _, d := range documents(t, folder) {
			node, err := kyaml.Parse(string(d))
			require.NoError(t, err)
			about, err := node.GetMeta()
			require.NoError(t, err)
			schema := openapi.SchemaForResourceType(about.TypeMeta)
			require.NotNil(t, schema, "%v", about.TypeMeta)
			var value any
			require.NoError(t, yaml.Unmarshal(d, &value))
			for _, wrong := range against(schema, value, about.Kind+" "+about.Name) {
				t.Errorf("%s: %s", folder, wrong)
			}
			n++
		}
	}
	require.Greater(t, n, 25)
}

// against lists where a value is not what its schema says.
func against(schema *openapi.ResourceSchema, value any, at string) (wrong []string) {
	if schema == nil || schema.Schema == nil {
		return nil
	}
	kind := strings.Join(schema.Schema.Type, "")
	is := map[string]bool{}
	switch v := value.(type) {
	case map[string]any:
		is["object"] = true
		for _, name := range schema.Schema.Required {
			if _, ok := v[name]; !ok {
				wrong = append(wrong, at+": "+name+" is required")
			}
		}
		for name, inner := range v {
			wrong = append(wrong, against(schema.Field(name), inner, at+"."+name)...)
		}
	case []any:
		is["array"] = true
		for i, inner := range v {
			wrong = append(wrong, against(schema.Elements(), inner, fmt.Sprintf("%s[%d]", at, i))...)
		}
	case bool:
		is["boolean"] = true
	case string:
		is["string"] = true
	default:
		is["integer"], is["number"] = true, true
		is["string"] = schema.Schema.Format == "int-or-string"
	}
	if kind != "" && !is[kind] {
		wrong = append(wrong, fmt.Sprintf("%s: %v is no %s", at, value, kind))
	}
	return wrong
}
